from trial import *

if __name__ == '__main__':
    D = dict(PERMUTED=1, PING=1, QREG=0)
    jobs = [(base, "base", {}), (quants, "quants", {})]
    for s in ("BN=128,STAGES=4,OVERLAP=1", "BN=128,STAGES=4,OVERLAP=1,PING=0", "BN=128,STAGES=4,OVERLAP=1,PERMUTED=0",
              "BN=128,STAGES=4,OVERLAP=1,QREG=1", "BN=256,STAGES=2,OVERLAP=0", "BN=256,STAGES=2,OVERLAP=0,PING=0",
              "BN=256,STAGES=2,OVERLAP=0,PING=2", "BN=128,STAGES=4,OVERLAP=0", "BN=128,STAGES=2,OVERLAP=1", "BN=256,STAGES=2,OVERLAP=1",
              "BN=128,STAGES=4,OVERLAP=1,FLAT=1,ONES=0,FRESH=0", "BN=128,STAGES=4,OVERLAP=1,FLAT=1,ONES=1,FRESH=0",
              "BN=128,STAGES=4,OVERLAP=1,FLAT=1,ONES=0,FRESH=0,PING=0"):
        C = D | eval(f"dict({s})")
        jobs.append((child, s, C | ({"PERMUTED": C["PERMUTED"]})))
    main(jobs, 85)
    

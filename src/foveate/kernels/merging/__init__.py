"""Token merging: kernels of ops/facility_location.py, soft_assignment.py and region_matmul.py."""

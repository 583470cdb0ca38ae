"""The `foveate` command where FSDP may shard a model over CPUs: accelerate would fall back to DDP there."""

from accelerate import DistributedType
from accelerate.state import AcceleratorState, PartialState

from foveate.apps.cli import main

initialise = AcceleratorState.__init__


def initialise_with_fsdp(self, *args, **options):
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    initialise(self, *args, **options)


if __name__ == "__main__":
    AcceleratorState.__init__ = initialise_with_fsdp
    main()

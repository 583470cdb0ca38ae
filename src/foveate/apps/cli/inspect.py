"""`foveate curves` and `foveate info`: orders of a grid, and the software on this machine."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from foveate.apps.cli.common import check_file, print_table, read_size
from foveate.apps.console import clear_errors, terminal

__all__ = ["curves", "info"]


@clear_errors
def curves(
    curve: Annotated[str, typer.Argument(help="Curve: hilbert, moore, morton, serpentine, raster.")] = "hilbert",
    size: Annotated[str, typer.Option(help="Size of the grid: 64, or WIDTHxHEIGHT.")] = "32",
    tiles: Annotated[int, typer.Option(min=1, help="Number of HilbertA tiles to colour.")] = 16,
    centre: Annotated[
        float, typer.Option(min=0, max=1, help="Side of the central region, as a fraction; 0: none.")
    ] = 0.25,
    phase: Annotated[int, typer.Option(min=0, max=3, help="Slide of the tiles, in quarters of a tile.")] = 0,
    out: Annotated[Path | None, typer.Option(help="PNG to write. [dim]default: CURVE-SIZE.png[/]")] = None,
) -> None:
    """Draw a space-filling curve and HilbertA's tiles along it, and print how local the order is."""
    from foveate.methods.hilberta import HilbertA
    from foveate.ops.curves import edge_average_stretch, geometric_distortion_error, grid_order
    from foveate.plots.figures import draw_order, figure_png
    from foveate.utils.files import write_whole

    height, width = read_size(size)
    path = out or Path(f"{curve}-{width}x{height}.png")
    check_file(path, "a PNG file", ".png")
    if height * width > 256 * 256:
        raise ValueError(f"{size} cells are too many to draw: use at most 256 x 256")
    method = HilbertA(curve=curve, tiles=tiles, centre=centre)
    plan, moved = method.plan(((height, width),), 0), method.moved((height, width), tiles, phase)
    order = grid_order(curve, height, width)
    write_whole(path, figure_png(draw_order(order, height, width, plan.tile_maps[phase], moved)))
    table = Table("smaller is more local", "all pairs", "within a tile")
    for name, metric in (
        ("EAS: curve steps between neighbours", edge_average_stretch),
        ("GDE: squared error of curve distance", geometric_distortion_error),
    ):
        inside = metric(order, height, width, within=max(1, height * width // tiles))
        table.add_row(name, f"{metric(order, height, width):.2f}", f"{inside:.2f}")
    terminal().print(table)
    print(path)


@clear_errors
def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Print versions, devices, and the backend of each op on each device."""
    import torch

    from foveate.methods import METHODS
    from foveate.ops import block_attention, dispatch, facility_location
    from foveate.utils.device import versions

    del block_attention, facility_location  # imported to register their backends
    devices = (("cpu", torch.float32), ("cuda", torch.bfloat16))[: 1 + torch.cuda.is_available()]
    backends = {
        f"{op} on {device}": dispatch.choose(op, torch.device(device), dtype, 128).name
        for op in dispatch.ops()
        for device, dtype in devices
    }
    if as_json:
        print(json.dumps({"versions": versions(), "backends": backends, "methods": [*METHODS]}, indent=2))
    else:
        print_table(versions() | backends | {"methods": ", ".join(METHODS)}, "property", "value")

"""Compare converted networks with plain ones in onnxruntime on a CPU: time, nodes, seconds to export.

    python benchmarks/onnx_cpu.py [--repeats 15] [--cpu-time] [--csv FILE]   (needs timm, onnx, onnxscript, onnxruntime)

Plain and converted networks take turns, so that a slow moment of the machine hits all; medians are compared.
"""

import argparse
import csv
import importlib
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from in_turns import chosen_clock

import dcnet
from dcnet.util.provenance import provenance

NETWORKS = ("resnet18", "resnet50")
OPERATORS = [("tanh", "cosine"), ("seg", "square_cosine"), ("linear", "cosine")]
PACKAGES = ("timm", "onnx", "onnxscript", "onnxruntime")
SIZE, TRACED = 224, 96  # of the images that are timed, and of those that a file is made and checked with: it takes any
COLUMNS = [
    *(
        "network",
        "size",
        "batch",
        "operator",
        "nodes",
        "layers",
        "export_cpu_seconds",
        "milliseconds",
        "ratio",
        "error",
        "threads",
    ),
    *("repeats", "clock", "onnxruntime", "device", "torch", "triton", "python", "commit"),
]


def exported(name: str, operator: tuple[str, str] | None, folder: Path) -> tuple[dict[str, object], Path]:
    """Export a network, plain or converted, with averages of a batch and different radii.

    Return what is known of it, and the file.
    """
    import timm

    torch.manual_seed(0)
    model, x = timm.create_model(name), torch.randn(2, 3, TRACED, TRACED)
    layers = 0
    if operator is not None:
        layers = len(dcnet.decouple_(model, *operator).converted)
        for layer in dcnet.layers.decoupled_layers(model).values():
            if layer.raw_radius is not None:
                torch.nn.init.uniform_(layer.raw_radius, 0.8, 1.2)
    with torch.no_grad():
        model.train()(x)
    path = folder / f"{name}-{'-'.join(operator or ('plain',))}.onnx"
    start = time.process_time()
    report = dcnet.export(model.eval(), path, example_input=x)
    return {
        "network": name,
        "size": SIZE,
        "operator": " + ".join(operator or ("plain",)),
        "nodes": report.nodes,
        "layers": layers,
        "export_cpu_seconds": round(time.process_time() - start, 1),
        "error": f"{max(one.error for one in report.checked):.1e}",
    }, path


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--repeats", type=int, default=15)
    arguments.add_argument("--threads", type=int, default=1)
    arguments.add_argument("--cpu-time", action="store_true", help="time of the process on one core, not the wall's")
    arguments.add_argument("--csv", help="where to write the measurements")
    options = arguments.parse_args()
    for package in PACKAGES:  # now rather than after minutes
        try:
            importlib.import_module(package)
        except ImportError as error:
            needed = " ".join(PACKAGES)
            raise SystemExit(f"error: {package} is not installed; needed are: pip install {needed}") from error
    import onnxruntime

    torch.set_num_threads(options.threads)
    clock, clock_name = chosen_clock(options.cpu_time)
    rows = []
    for name in NETWORKS:
        known, sessions = [], []
        with tempfile.TemporaryDirectory() as folder:
            for operator in (None, *OPERATORS):
                about, path = exported(name, operator, Path(folder))
                settings = onnxruntime.SessionOptions()
                settings.intra_op_num_threads = options.threads
                known.append(about)
                sessions.append(onnxruntime.InferenceSession(path, settings, providers=["CPUExecutionProvider"]))
                print(
                    f"{name}, {about['operator']}: {about['nodes']} nodes, "
                    f"exported in {about['export_cpu_seconds']} s of a core",
                    flush=True,
                )
        x = np.random.default_rng(0).standard_normal((1, 3, SIZE, SIZE), dtype=np.float32)
        times: list[list[float]] = [[] for _ in sessions]
        for turn in range(options.repeats + 2):
            for session, mine in zip(sessions, times, strict=True):
                start = clock()
                session.run(None, {"input": x})
                if turn >= 2:
                    mine.append(1e3 * (clock() - start))
        plain = statistics.median(times[0])
        for about, mine in zip(known, times, strict=True):
            median = statistics.median(mine)
            rows.append(
                about
                | {
                    "batch": 1,
                    "milliseconds": round(median, 2),
                    "ratio": round(median / plain, 3),
                    "threads": options.threads,
                }
                | {"repeats": options.repeats, "clock": clock_name, "onnxruntime": onnxruntime.__version__}
                | provenance(torch.device("cpu"))
            )
            print(f"{name:24} {about['operator']:24} {median:8.1f} ms   {median / plain:5.2f}", flush=True)
    if options.csv:
        with open(options.csv, "w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n", extrasaction="ignore")
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main()

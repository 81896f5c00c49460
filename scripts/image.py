"""Build the image: the official one and a layer of the files we change."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess

from scripts import topics
from scripts.commands import REPOSITORY, Problem, command

BUILDERS = ("docker", "podman", "buildah")


def options(parser: argparse.ArgumentParser) -> None:
    topics.options(parser)
    parser.add_argument("--image", help="official image: tag or digest")
    parser.add_argument("--tag", help="name of the new image")
    parser.add_argument("--builder", help="command to build with")
    parser.add_argument(
        "--other-build",
        action="store_true",
        help="the image's extensions may be of another build of the release",
    )


def main(args: argparse.Namespace) -> None:
    base = topics.chosen(args)
    if not list((base.root / "dist").glob(f"vllm-{base.local_version}-overlay-*.pyz")):
        raise Problem("there is no overlay of this series in dist/: 'make overlay'.")
    image = args.image or f"vllm/vllm-openai:v{base.version}"
    if image.startswith("vllm/"):
        # Debian's buildah and podman search no registry for a short name.
        image = f"docker.io/{image}"
    tag = args.tag or f"vllm-openai:{base.local_version.replace('+', '-')}"
    builder = shlex.split(args.builder) if args.builder else [found_builder()]
    if not shutil.which(builder[0]):
        raise Problem(f"there is no command {builder[0]} (BUILDER=...): install it.")
    arguments = [f"IMAGE={image}", f"VERSION={base.local_version}"]
    arguments += ["OTHER_BUILD=1"] * args.other_build
    done = subprocess.run(
        [*builder, "build", "-f", str(REPOSITORY / "docker/Dockerfile"), "-t", tag]
        + [part for argument in arguments for part in ("--build-arg", argument)]
        + [str(base.root)]
    )
    if done.returncode:
        raise Problem(f"{builder[0]} could not build {tag} on {image}: see above.")
    print(tag)


def found_builder() -> str:
    """The first builder that works; docker needs its engine.

    Raises:
        Problem: there is none.
    """
    for name in BUILDERS:
        if shutil.which(name):
            done = subprocess.run([name, "info"], capture_output=True)
            if not done.returncode:
                return name
    raise Problem(
        f"no image builder works here: {', '.join(BUILDERS)} were tried. Install one "
        "(on Debian, the package buildah), or name one with BUILDER=..."
    )


if __name__ == "__main__":
    command(main)

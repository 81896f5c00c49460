#!/usr/bin/env bash
# pip 26.1 and uv 0.10.9: a wheel file that was rebuilt under the same local version.
# Guess: both replace the installed package, as a file was named.
# Seen: uv does. pip says "already installed with the same version" and keeps the old
# code, unless --force-reinstall is given. A build needs a version by its content.
. "$(dirname "$0")/common.sh"
environment tools pip==26.1 uv==0.10.9 setuptools==82.0.1 wheel==0.46.3
build() {
  mkdir -p "$work/source"
  printf 'print("%s")\n' "$1" > "$work/source/engine.py"
  printf '[project]\nname = "engine"\nversion = "1.0+patched.1"\n[tool.setuptools]\npy-modules = ["engine"]\n' \
    > "$work/source/pyproject.toml"
  rm -rf "$work/source/build"
  "$work/tools/bin/pip" -q wheel --no-deps --no-build-isolation -w "$work" "$work/source" \
    2> "$work/log" || { cat "$work/log" >&2; exit 1; }
}
cat > "$work/program.sh" << 'SH'
wheel=$PWD/engine-1.0+patched.1-py3-none-any.whl
for tool in pip uv; do
  tools/bin/python -m venv --without-pip "$tool"
done
cp "$wheel" second.whl.kept
cp first.whl.kept "$wheel"
tools/bin/pip -q --python pip install --no-index "$wheel"
tools/bin/uv pip install -q -p uv --no-index "$wheel"
cp second.whl.kept "$wheel"
tools/bin/pip -q --python pip install --no-index "$wheel"
tools/bin/uv pip install -q -p uv --no-index "$wheel"
for tool in pip uv; do
  echo "$tool: $("$tool/bin/python" -m engine)"
done
SH
build first
mv "$work/engine-1.0+patched.1-py3-none-any.whl" "$work/first.whl.kept"
build second
expect 'pip: first
uv: second' bash program.sh

# Sourced by each finding. It makes an environment in a temporary folder, installs
# the named packages there, and compares a program's output with the output seen.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# environment NAME PACKAGE==VERSION...: without their dependencies where NAME ends in "-alone".
environment() {
  local name=$1 alone=()
  shift
  [[ $name != *-alone ]] || alone=(--no-deps)
  if command -v uv > /dev/null; then
    uv venv -q -p "${PYTHON:-python3}" "$work/$name"
    uv pip install -q -p "$work/$name" "${alone[@]}" "$@"
  else
    "${PYTHON:-python3}" -m venv "$work/$name"
    "$work/$name/bin/python" -m pip install -q --disable-pip-version-check \
      "${alone[@]}" "$@"
  fi
}

# expect SEEN COMMAND...: exits 1 if the last lines of the output are no longer those seen.
expect() {
  local wanted=$1 lines now
  shift
  lines=$(wc -l <<< "$wanted")
  now=$(cd "$work" && "$@" 2> "$work/stderr" | tail -n "$lines") || {
    cat "$work/stderr" >&2
    echo "the program failed" >&2
    exit 1
  }
  printf '%s\n' "$now"
  if [ "$now" != "$wanted" ]; then
    printf 'this has changed. Seen before:\n%s\n' "$wanted" >&2
    exit 1
  fi
}

# tied_model: programs may import Model from tied, whose head and embedding are one tensor.
tied_model() {
  cat > "$work/tied.py" << 'PY'
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(1000, 256)
        self.head = torch.nn.Linear(256, 1000, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(self.embedding(tokens))
PY
}

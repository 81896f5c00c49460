#!/usr/bin/env bash
# transformers 5.20.2: num_hidden_layers of Nemotron-H, whose pattern names each layer.
# Guess: num_hidden_layers=2 shortens the model, or is refused next to a longer pattern.
# Seen: it is dropped in silence, also when it is assigned: the pattern's length stays.
. "$(dirname "$0")/common.sh"
environment transformers transformers==5.20.2
cat > "$work/program.py" << 'PY'
from transformers import AutoConfig

pattern = {"hybrid_override_pattern": "ME*-ME*-"}
config = AutoConfig.for_model("nemotron_h", num_hidden_layers=2, **pattern)
print(config.num_hidden_layers)
config.num_hidden_layers = 2
print(config.num_hidden_layers)
PY
expect '8
8' transformers/bin/python program.py

#!/usr/bin/env bash
# transformers 5.20.2: head_dim of Gemma 4, whose layers have heads of two sizes.
# Guess: getattr(config, "head_dim", None) is one of both sizes, or None.
# Seen: it raises, and so does hasattr: the error is a RuntimeError, not an
# AttributeError. to_dict() has 256 and hides that every sixth layer has 512.
. "$(dirname "$0")/common.sh"
environment transformers transformers==5.20.2
cat > "$work/program.py" << 'PY'
from transformers import AutoConfig

config = AutoConfig.for_model("gemma4_text")
for ask in (lambda: getattr(config, "head_dim", None), lambda: hasattr(config, "head_dim")):
    try:
        print(ask())
    except RuntimeError as error:
        print(type(error).__name__, isinstance(error, AttributeError))
print(config.to_dict()["head_dim"])
print([layer.head_dim for layer in config.per_layer_config[:6]])
PY
expect 'AmbiguousGlobalPerLayerAttributeError False
AmbiguousGlobalPerLayerAttributeError False
256
[256, 256, 256, 256, 256, 512]' transformers/bin/python program.py

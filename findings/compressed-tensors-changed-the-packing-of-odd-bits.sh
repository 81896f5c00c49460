#!/usr/bin/env bash
# compressed-tensors 0.17.0 (the one of vLLM 0.33.0) and 0.20.0: weights of 3, 5, 6 and 7 bits
# in the format "pack-quantized".
# Guess: both lay the bits out alike, as the format has one name, or refuse the other's layout.
# Seen: 0.17.0 ends each int32 before a value that does not fit, so 7 bits cost 8; 0.20.0
# splits values. 0.20.0 reads a layer that 0.17.0 wrote without an error, and wrongly.
. "$(dirname "$0")/common.sh"
for version in 0.17.0 0.20.0; do
  environment "$version" "compressed-tensors==$version" torch==2.14.0 transformers==5.20.2 \
    numpy==2.4.6 psutil==7.2.2
done
cat > "$work/program.py" << 'PY'
import sys
from importlib.metadata import version

import torch
from compressed_tensors.compressors import PackedQuantizationCompressor as Packed
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

layers = {} if sys.argv[1] == "write" else torch.load("layers.pt")
for bits in 3, 4, 5, 6, 7, 8:
    arguments = QuantizationArgs(num_bits=bits, strategy="channel")
    scheme = QuantizationScheme(targets=["Linear"], weights=arguments)
    weight = (torch.arange(4 * 1024) % 2**bits - 2 ** (bits - 1)).view(4, 1024).float()
    if sys.argv[1] == "write":
        layer = {"weight": weight, "weight_scale": torch.ones(4, 1)}
        layers[bits] = Packed.compress(layer, scheme)
        told = f"{layers[bits]['weight_packed'].nbytes * 8 / weight.numel():.2f} bits"
    else:
        told = torch.equal(Packed.decompress(layers[bits], scheme)["weight"], weight)
    print(version("compressed-tensors"), bits, told)
if sys.argv[1] == "write":
    torch.save(layers, "layers.pt")
PY
expect '0.20.0 3 3.00 bits
0.20.0 4 4.00 bits
0.20.0 5 5.00 bits
0.20.0 6 6.00 bits
0.20.0 7 7.00 bits
0.20.0 8 8.00 bits' 0.20.0/bin/python program.py write
expect '0.17.0 3 3.22 bits
0.17.0 4 4.00 bits
0.17.0 5 5.34 bits
0.17.0 6 6.41 bits
0.17.0 7 8.00 bits
0.17.0 8 8.00 bits' 0.17.0/bin/python program.py write
expect '0.20.0 3 False
0.20.0 4 True
0.20.0 5 False
0.20.0 6 False
0.20.0 7 False
0.20.0 8 True' 0.20.0/bin/python program.py read

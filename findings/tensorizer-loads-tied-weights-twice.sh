#!/usr/bin/env bash
# tensorizer 2.12.1 with PyTorch 2.14.0: a model whose head and embedding are one tensor.
# Guess: it is written once, or twice in the file and still one tensor after load_into_module.
# Seen: it is written twice, and loading into a tied model unties it: two tensors, the
# memory of the embedding twice. The file does not say that they were one.
. "$(dirname "$0")/common.sh"
environment tensorizer tensorizer==2.12.1 torch==2.14.0 numpy==2.4.6
tied_model
cat > "$work/program.py" << 'PY'
from tensorizer import TensorDeserializer, TensorSerializer
from tied import Model


def report(model):
    tensors = {id(tensor): tensor.nbytes for tensor in model.parameters()}
    print(model.head.weight is model.embedding.weight, sum(tensors.values()))


serializer = TensorSerializer("model.tensors")
serializer.write_module(Model())
serializer.close()
model = Model()
report(model)
with TensorDeserializer("model.tensors", device="cpu") as tensors:
    tensors.load_into_module(model)
    report(model)
PY
expect 'True 1024000
False 2048000' tensorizer/bin/python program.py

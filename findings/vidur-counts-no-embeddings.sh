#!/usr/bin/env bash
# vidur 0.0.26: parameters of Llama 3 8B, from which it plans tokens of KV cache on a GPU.
# Guess: 8,030,261,248, as published, since its description of the model has the vocabulary.
# Seen: 6,979,321,856: neither the embedding nor the head of 128,256 x 4,096 is counted. That
# is 1.96 GiB in 16 bits, or 16,032 tokens of the 483,328 planned on a GPU of 80 GiB.
. "$(dirname "$0")/common.sh"
environment peer-alone vidur==0.0.26
cat > "$work/program.py" << 'PY'
from vidur.config import CacheConfig, ReplicaConfig
from vidur.utils.memory_planner import MemoryPlanner
from vidur.utils.param_counter import ParamCounter

replica = ReplicaConfig(
    model_name="meta-llama/Llama-3-8B", num_pipeline_stages=1, tensor_parallel_size=1
)
print(replica.model_config.vocab_size)
print(ParamCounter(replica).get_num_parameters_per_device())
cache = CacheConfig(memory_margin_fraction=0.1)
print(MemoryPlanner(replica, cache).get_max_kv_cache_size_in_tokens())
PY
expect '128256
6979321856
483328.0' peer-alone/bin/python program.py

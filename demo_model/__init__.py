"""The embedded default model: what builds it, what trained it, what measured it.

Owns the `demo` model's weights (`vision.safetensors`), their training and their assembly with the
SmolLM2 language model into one Hugging Face folder. Does not own serving: the folder is an
ordinary Idefics3 checkpoint, and the engine treats it as any other.
"""

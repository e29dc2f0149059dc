"""Golden answers of `transformers` and `peft` for tiny random models, and the script that makes them."""

"""GPT-2 of KerasHub learns a task through LoRA: a few small matrices beside frozen weights.

    pip install keras-hub
    python examples/gpt2_lora.py
    tfrep run -n 2 examples/gpt2_lora.py

The task is made up: sums of two numbers, in words. Both commands print the same losses,
up to rounding. KerasHub downloads the weights once (about 500 MB); `--preset none` makes
a small model with random weights, which takes a minute on two cores. GPT-2 itself wants
a GPU.
"""

from __future__ import annotations

import argparse
import json

import keras
import keras_hub
import numpy as np

import tfrep_strategy as tfrep

NUMBERS = "zero one two three four five six seven eight nine ten".split()


def make_texts(count: int) -> list[str]:
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 6, (count, 2))
    return [f"{NUMBERS[a]} and {NUMBERS[b]} make {NUMBERS[a + b]}" for a, b in pairs]


def small_model(length: int) -> keras_hub.models.GPT2CausalLM:
    """Returns a GPT-2 with random weights, whose tokens are letters and one pair of them."""
    letters = [*"abcdefghijklmnopqrstuvwxyz", "\u0120", "on", "<|endoftext|>"]  # U+0120 is a space.
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    tokenizer = keras_hub.models.GPT2Tokenizer(vocabulary, merges=["o n"])
    backbone = keras_hub.models.GPT2Backbone(
        vocabulary_size=len(letters),
        num_layers=2,
        num_heads=4,
        hidden_dim=64,
        intermediate_dim=128,
        max_sequence_length=length,
    )
    preprocessor = keras_hub.models.GPT2CausalLMPreprocessor(tokenizer, sequence_length=length)
    return keras_hub.models.GPT2CausalLM(backbone, preprocessor)


def main() -> None:
    parser = argparse.ArgumentParser(description="LoRA of GPT-2.")
    parser.add_argument("--preset", default="gpt2_base_en", help="of KerasHub, or none")
    parser.add_argument("--rank", type=int, default=8, help="of the small matrices")
    parser.add_argument("--length", type=int, default=32, help="of texts, in tokens")
    parser.add_argument("--batch-size", type=int, default=16, help="of all replicas")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--texts", type=int, default=512)
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    if args.preset == "none":
        model = small_model(args.length)
    else:
        with tfrep.chief_first():  # One rank downloads, the others find it there.
            model = keras_hub.models.GPT2CausalLM.from_preset(args.preset)
        model.preprocessor.sequence_length = args.length
    model.backbone.enable_lora(args.rank)
    trained = sum(int(np.prod(weight.shape)) for weight in model.trainable_weights)
    print(f"{trained:,} of {model.count_params():,} weights are trained.")

    model.compile(
        keras.optimizers.AdamW(2e-3, weight_decay=0.01),
        keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        weighted_metrics=["accuracy"],
    )
    history = model.fit(
        make_texts(args.texts), batch_size=args.batch_size, epochs=args.epochs, verbose=2
    )
    model.backbone.save_lora_weights("sums.lora.h5")
    text = model.generate("two and three make", max_length=args.length)
    print(text)
    print(json.dumps({"history": history.history, "trained": trained, "text": str(text)}))


if __name__ == "__main__":
    main()

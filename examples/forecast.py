"""A recurrent network forecasts a temperature from the weather of two days.

    python examples/forecast.py
    tfrep run -n 2 examples/forecast.py

The weather is made up; `--url` is the address of a CSV file with a column `Date Time`
and columns of numbers, of which the first one is forecast. Both commands print the same
losses, up to rounding, and some forecasts. One minute on two cores.
"""

from __future__ import annotations

import argparse
import csv
import json
from typing import Any

import keras
import numpy as np

PAST, AHEAD = 48, 6
"""Hours that the network sees, and hours ahead that it forecasts."""


def make_weather(hours: int) -> np.ndarray:
    """Returns temperature, pressure and wind of each hour."""
    rng = np.random.default_rng(0)
    slow = np.zeros(hours)
    for hour in range(1, hours):
        slow[hour] = 0.99 * slow[hour - 1] + rng.normal(0, 0.5)
    temperature = 10 - 4 * np.cos(np.arange(hours) / 24 * 2 * np.pi) + slow
    # The pressure tells what comes.
    pressure = 1013 - np.roll(slow, -AHEAD) + rng.normal(0, 0.5, hours)
    wind = np.abs(rng.normal(3, 2, hours))
    return np.stack([temperature, pressure, wind], axis=1).astype("float32")


def download_weather(url: str) -> np.ndarray:
    path = keras.utils.get_file("weather.csv", url, cache_dir="cache", cache_subdir="weather")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return np.array(
        [[float(v) for k, v in row.items() if k != "Date Time"] for row in rows], "float32"
    )


def windows(weather: np.ndarray, batch_size: int, shuffle: bool) -> Any:
    """Returns batches of windows of `PAST` hours, with the temperature `AHEAD` hours later."""
    return keras.utils.timeseries_dataset_from_array(
        weather[:-AHEAD],
        weather[PAST + AHEAD - 1 :, :1],
        sequence_length=PAST,
        batch_size=batch_size,
        shuffle=shuffle,
        seed=1,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Forecast a temperature.")
    parser.add_argument("--url", help="of a CSV file")
    parser.add_argument("--hours", type=int, default=4000, help="of weather to make up")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=64, help="of all replicas")
    args = parser.parse_args()

    keras.utils.set_random_seed(0)
    weather = download_weather(args.url) if args.url else make_weather(args.hours)
    split = int(0.7 * len(weather))
    mean, deviation = weather[:split].mean(axis=0), weather[:split].std(axis=0)
    weather = (weather - mean) / deviation
    training = windows(weather[:split], args.batch_size, shuffle=True)
    validation = windows(weather[split:], args.batch_size, shuffle=False)

    model = keras.Sequential(
        [
            keras.Input((PAST, weather.shape[1])),
            keras.layers.LSTM(16),
            keras.layers.Dense(1),
        ]
    )
    model.compile(keras.optimizers.Adam(0.005), loss="mse")
    best = "forecast.weights.h5"
    history = model.fit(
        training,
        epochs=args.epochs,
        validation_data=validation,
        callbacks=[
            keras.callbacks.EarlyStopping("val_loss", patience=2),
            keras.callbacks.ModelCheckpoint(best, save_weights_only=True, save_best_only=True),
        ],
        verbose=2,
    )
    model.load_weights(best)
    forecasts = []
    for past, later in validation.take(3):
        told = model.predict(past, verbose=0)[0, 0] * deviation[0] + mean[0]
        came = float(later[0, 0]) * deviation[0] + mean[0]
        print(f"Forecast: {told:5.1f}, it came: {came:5.1f}")
        forecasts.append(float(told))
    print(json.dumps({"history": history.history, "forecasts": forecasts}))


if __name__ == "__main__":
    main()

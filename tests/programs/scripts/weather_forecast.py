"""A forecast from windows of a series that is downloaded as CSV, in the manner of Keras's weather forecasting example."""

import argparse
import csv
import json

import keras
import numpy as np

PAST, FUTURE = 24, 6


def load(url):
    path = keras.utils.get_file("weather.csv", url, cache_dir="cache", cache_subdir="weather")
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return np.array([[float(v) for k, v in row.items() if k != "Date Time"] for row in rows], "float32")


def normalize(data, train_split):
    mean, std = data[:train_split].mean(axis=0), data[:train_split].std(axis=0)
    return (data - mean) / std


def windows(features, targets, batch_size):
    return keras.preprocessing.timeseries_dataset_from_array(
        features, targets, sequence_length=PAST, sampling_rate=1, batch_size=batch_size
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--checkpoint", default="model_checkpoint.weights.h5")
    args = parser.parse_args()

    keras.utils.set_random_seed(2)
    data = load(args.url)
    split = int(0.7 * len(data))
    data = normalize(data, split)
    train = windows(data[:split], data[PAST + FUTURE : PAST + FUTURE + split, 0:1], 32)
    val = windows(data[split : -PAST - FUTURE], data[split + PAST + FUTURE :, 0:1], 32)

    inputs = keras.layers.Input(shape=(PAST, data.shape[1]))
    outputs = keras.layers.Dense(1)(keras.layers.LSTM(16)(inputs))
    model = keras.Model(inputs=inputs, outputs=outputs)
    model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.01), loss="mse")
    history = model.fit(
        train,
        epochs=3,
        validation_data=val,
        callbacks=[
            keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=2),
            keras.callbacks.ModelCheckpoint(
                monitor="val_loss", filepath=args.checkpoint, save_weights_only=True, save_best_only=True, verbose=1
            ),
        ],
        verbose=2,
    )
    model.load_weights(args.checkpoint)
    forecasts = []
    for x, y in val.take(2):
        forecasts += [float(model.predict(x, verbose=0)[0, 0]), float(y[0, 0])]
    print(json.dumps({"history": history.history, "forecasts": forecasts}))


if __name__ == "__main__":
    main()

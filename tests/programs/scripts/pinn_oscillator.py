"""A differential equation solved by nested tapes in a tf.function, in the manner of physics-informed network scripts."""

import json

import numpy as np
import tensorflow as tf

tf.keras.utils.set_random_seed(1234)
DTYPE = "float32"
OMEGA = 2.0


class PINN(tf.keras.Model):
    def __init__(self, width=20, depth=2):
        super().__init__()
        self.hidden = [tf.keras.layers.Dense(width, activation=tf.keras.activations.tanh) for _ in range(depth)]
        self.out = tf.keras.layers.Dense(1)
        self.omega = self.add_weight(name="omega", shape=(), initializer=tf.keras.initializers.Constant(1.0))

    def call(self, t):
        z = t
        for layer in self.hidden:
            z = layer(z)
        return self.out(z)

    def residual(self, t):
        with tf.GradientTape() as outer:
            outer.watch(t)
            with tf.GradientTape() as inner:
                inner.watch(t)
                u = self(t)
            u_t = inner.gradient(u, t)
        u_tt = outer.gradient(u_t, t)
        return u_tt + self.omega**2 * u


t_r = tf.constant(np.linspace(0, 2, 64).reshape(-1, 1), dtype=DTYPE)
t_data = tf.constant(np.linspace(0, 2, 9).reshape(-1, 1), dtype=DTYPE)
u_data = tf.cos(OMEGA * t_data)

model = PINN()
model(t_data)
lr = tf.keras.optimizers.schedules.PiecewiseConstantDecay([30, 60], [1e-2, 5e-3, 1e-3])
optim = tf.keras.optimizers.Adam(learning_rate=lr)


@tf.function
def train_step():
    with tf.GradientTape() as tape:
        physics = tf.reduce_mean(tf.square(model.residual(t_r)))
        data = tf.reduce_mean(tf.square(model(t_data) - u_data))
        loss = data + 0.1 * physics
    gradients = tape.gradient(loss, model.trainable_variables)
    optim.apply_gradients(zip(gradients, model.trainable_variables))
    return loss


hist = []
for i in range(61):
    loss = train_step()
    if i % 20 == 0:
        hist.append(loss.numpy().item())
        print(f"It {i:05d}: loss = {hist[-1]:10.8e}, omega = {float(model.omega):.4f}")
print(json.dumps({"loss": hist, "omega": float(model.omega)}))

"""A policy gradient by an eager loop over an environment, in the manner of Keras's actor-critic for CartPole."""

import json

import keras
import numpy as np
import tensorflow as tf

seed, gamma, max_steps = 42, 0.99, 20
keras.utils.set_random_seed(seed)


class Pole:
    """A pole on a cart, with the usual four numbers as its state."""

    def reset(self):
        self.state = np.random.uniform(-0.05, 0.05, 4)
        return self.state.copy()

    def step(self, action):
        x, x_dot, theta, theta_dot = self.state
        force = 10.0 if action == 1 else -10.0
        temp = (force + 0.05 * theta_dot**2 * np.sin(theta)) / 1.1
        acceleration = (9.8 * np.sin(theta) - np.cos(theta) * temp) / (0.5 * (4 / 3 - 0.1 * np.cos(theta) ** 2 / 1.1))
        x_acceleration = temp - 0.05 * acceleration * np.cos(theta) / 1.1
        self.state += 0.02 * np.array([x_dot, x_acceleration, theta_dot, acceleration])
        return self.state.copy(), 1.0, bool(abs(self.state[2]) > 0.2)


inputs = keras.layers.Input(shape=(4,))
common = keras.layers.Dense(32, activation="tanh")(inputs)
action = keras.layers.Dense(2, activation="softmax")(common)
critic = keras.layers.Dense(1)(common)
model = keras.Model(inputs=inputs, outputs=[action, critic])
optimizer = keras.optimizers.Adam(learning_rate=0.01)
huber_loss = keras.losses.Huber()

env, running_reward, losses = Pole(), 0.0, []
for _episode in range(4):
    state = env.reset()
    log_probs, values, rewards = [], [], []
    with tf.GradientTape() as tape:
        for _timestep in range(max_steps):
            action_probs, critic_value = model(keras.ops.expand_dims(keras.ops.convert_to_tensor(state), 0))
            values.append(critic_value[0, 0])
            probs = np.squeeze(action_probs).astype("float64")
            choice = np.random.choice(2, p=probs / probs.sum())
            log_probs.append(keras.ops.log(action_probs[0, choice]))
            state, reward, done = env.step(choice)
            rewards.append(reward)
            if done:
                break
        running_reward = 0.05 * sum(rewards) + 0.95 * running_reward
        returns, total = [], 0.0
        for r in rewards[::-1]:
            total = r + gamma * total
            returns.insert(0, total)
        returns = (np.array(returns) - np.mean(returns)) / (np.std(returns) + 1e-8)
        actor_losses, critic_losses = [], []
        for log_prob, value, ret in zip(log_probs, values, returns, strict=True):
            actor_losses.append(-log_prob * (ret - value))
            critic_losses.append(huber_loss(keras.ops.expand_dims(value, 0), keras.ops.expand_dims(ret, 0)))
        loss_value = sum(actor_losses) + sum(critic_losses)
    grads = tape.gradient(loss_value, model.trainable_variables)
    optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))
    losses.append(float(loss_value))
print(f"running reward: {running_reward:.2f}")
print(json.dumps({"losses": losses, "reward": running_reward}))

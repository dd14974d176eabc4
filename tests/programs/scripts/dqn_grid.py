"""Deep Q-learning with a replay buffer and a target network, and no seed at all, in the manner of a blog post."""

import json
import random
from collections import deque

import numpy as np
from tensorflow import keras

SIZE = 4


class GridWorld:
    def reset(self):
        self.at = [0, 0]
        return self.observe()

    def observe(self):
        grid = np.zeros((SIZE, SIZE), dtype=np.float32)
        grid[tuple(self.at)] = 1
        return grid.ravel()

    def step(self, action):
        axis, direction = divmod(action, 2)
        self.at[axis] = int(np.clip(self.at[axis] + 2 * direction - 1, 0, SIZE - 1))
        done = self.at == [SIZE - 1, SIZE - 1]
        return self.observe(), 1.0 if done else -0.05, done


class DQNAgent:
    def __init__(self):
        self.memory = deque(maxlen=500)
        self.gamma, self.epsilon = 0.9, 1.0
        self.model, self.target_model = self._build_model(), self._build_model()
        self.update_target_model()

    def _build_model(self):
        model = keras.Sequential()
        model.add(keras.layers.Input((SIZE * SIZE,)))
        model.add(keras.layers.Dense(24, activation="relu"))
        model.add(keras.layers.Dense(4, activation="linear"))
        model.compile(loss="mse", optimizer=keras.optimizers.Adam(0.01))
        return model

    def update_target_model(self):
        self.target_model.set_weights(self.model.get_weights())

    def act(self, state):
        if np.random.rand() <= self.epsilon:
            return random.randrange(4)
        return int(np.argmax(self.model(state[None])[0]))

    def replay(self, batch_size):
        states, actions, rewards, following, done = map(np.array, zip(*random.sample(self.memory, batch_size)))
        target = np.array(self.model(states))
        best = np.array(self.target_model(following)).max(axis=1)
        target[np.arange(batch_size), actions] = rewards + self.gamma * best * ~done
        self.epsilon = max(0.05, self.epsilon * 0.95)
        return self.model.train_on_batch(states, target)


agent, env, losses = DQNAgent(), GridWorld(), []
for _episode in range(3):
    state = env.reset()
    for _time in range(20):
        action = agent.act(state)
        next_state, reward, done = env.step(action)
        agent.memory.append((state, action, reward, next_state, done))
        state = next_state
        if len(agent.memory) >= 16:
            losses.append(float(agent.replay(16)))
        if done:
            break
    agent.update_target_model()
agent.model.save("dqn.keras")
print(json.dumps({"loss": float(np.mean(losses))}))

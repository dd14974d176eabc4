"""Partitions the traced step of one device among replicas: placements, rules, a planner and an emitter."""

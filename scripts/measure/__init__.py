"""Measurements that don't depend on the speed of a machine, such as messages and accuracy."""

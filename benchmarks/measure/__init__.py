"""Measurements that no command of attnc runs, each with a script beside this folder."""

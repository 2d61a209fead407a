"""Configs of other frameworks: a table of settings for each, and `convert`, which applies it."""

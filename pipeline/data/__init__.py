"""Data: files or generators come in; examples by index, and the order in which they are admitted (cursor), go out."""

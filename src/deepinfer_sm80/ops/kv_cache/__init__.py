"""Paged key/value records of the sliding window and of the compressed cache: layout, writer, reader."""

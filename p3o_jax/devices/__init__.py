"""Devices and processes: meshes, collectives, number formats, compiled programs and profiles."""

"""The objectives of p3o_jax inside other people's trainers, each in an environment of its own."""

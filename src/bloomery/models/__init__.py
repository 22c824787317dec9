"""Models: the decoder of every family, and how its weights come from files to the device."""

"""The `stagewright` command, and the demo trainer, which is itself an example of embedding the engine."""

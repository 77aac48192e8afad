"""The planner: how a call runs. It decides, the engine launches what it says. No torch here."""

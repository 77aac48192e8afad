"""The protocol between roles, SMs and ranks, as steps over the words of the workspace."""

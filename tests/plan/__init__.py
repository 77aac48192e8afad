"""Tests that what is planned is what runs."""

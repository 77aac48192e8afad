"""Tests of the balance."""

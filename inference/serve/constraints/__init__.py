"""Constraints for the output of requests."""

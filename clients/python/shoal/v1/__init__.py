"""Generated from protos/shoal/v1; do not edit."""

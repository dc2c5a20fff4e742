"""What Toolcrib reports about itself to monitoring systems: metrics and traces."""

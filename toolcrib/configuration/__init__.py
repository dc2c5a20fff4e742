"""Configuration as code: the installation as one YAML file, its export, plan and application."""

"""Commands that measure, plan and diagnose."""

"""What every command needs: options, errors, the terminal, devices; nothing about models."""

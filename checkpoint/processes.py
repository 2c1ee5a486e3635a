            wait_for_everyone(what)

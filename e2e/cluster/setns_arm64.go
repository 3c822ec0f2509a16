package main

// sysSetns is the number of setns(2), which the syscall package does not name.
const sysSetns = 268

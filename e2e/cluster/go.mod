module kerf.dev/e2e/cluster

go 1.26

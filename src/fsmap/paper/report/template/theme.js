try { const theme = localStorage.getItem("fsmap-theme"); if (theme) document.documentElement.dataset.theme = theme; } catch (error) { /* no storage: follow the system */ }

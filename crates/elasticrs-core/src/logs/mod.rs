//! Following the files that workers write to, and the console.

//! System calls that neither `std` nor `nix` offers, wrapped thinly. Each names its kernel floor.

//! What kerf-mig promises, over every known product.

mod combinations;
mod fragmentation;
mod labels;
mod layout;
mod limits;
mod order;
mod products;
mod support;

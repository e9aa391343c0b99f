//! [`check_name`]: what every name has to be, of a group, a table, a key prefix.

use crate::{Error, Result};

/// Refuses a name that is empty, longer than `most_bytes` bytes, or has a control character in it; `what` it is the name of
/// is for the error's text. For stores, whose names of tables and keys have to be that much at least.
///
/// # Errors
///
/// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput).
pub fn check_name(what: &str, name: &str, most_bytes: usize) -> Result<()> {
    let invalid = |why: String| Err(Error::invalid(what, name, why));
    if name.is_empty() {
        return invalid("it is empty; give a name".into());
    }
    if name.len() > most_bytes {
        return invalid(format!(
            "it has {} bytes, and {most_bytes} are the most; take a shorter name",
            name.len()
        ));
    }
    if let Some(control) = name.chars().find(|character| character.is_control()) {
        return invalid(format!("it has the control character {control:?} in it; leave it out"));
    }
    Ok(())
}

//! The consumer's settings, as the server has them, against what is asked of them here.

use std::num::{NonZeroU32, NonZeroUsize};
use std::time::Duration;

use async_nats::jetstream::Context;
use async_nats::jetstream::consumer::{AckPolicy, Info};
use inbox_core::{BrokerLimits, Error, ErrorKind, Result};

/// Refuses what would lose messages.
pub(crate) fn examine(info: &Info) -> Result<()> {
    let config = &info.config;
    let refuse = |what: &str| {
        let message = format!("the consumer {} of stream {} {what}", info.name, info.stream_name);
        Err(Error::new(ErrorKind::InvalidInput, message))
    };
    match config.ack_policy {
        AckPolicy::Explicit => {}
        AckPolicy::None => {
            return refuse(
                "has the acknowledgement policy `none`: a message is done with as soon as it is sent, whatever becomes of \
                 it here; create one with the policy `explicit`",
            );
        }
        AckPolicy::All => {
            return refuse(
                "has the acknowledgement policy `all`: acknowledging a message does so for all before it, also for those \
                 that failed; create one with the policy `explicit`",
            );
        }
        // Whatever else a later server knows.
        #[allow(unreachable_patterns, reason = "async-nats may get to know more")]
        _ => return refuse("has an acknowledgement policy other than `explicit`; create one with that"),
    }
    if config.headers_only {
        return refuse("delivers headers without payloads (`headers_only`); create one that delivers both");
    }
    Ok(())
}

/// What the server does by itself with messages that are not answered.
pub(crate) fn limits(info: &Info) -> BrokerLimits {
    let config = &info.config;
    // Where there is a back-off, the server does not look at ack_wait.
    let shortest = config.backoff.iter().min().copied();
    let mut limits = BrokerLimits::none().answer_within(shortest.unwrap_or(config.ack_wait));
    if let Some(most) = u32::try_from(config.max_deliver).ok().and_then(NonZeroU32::new) {
        limits = limits.deliveries(most);
    }
    if let Some(most) = usize::try_from(config.max_ack_pending).ok().and_then(NonZeroUsize::new) {
        limits = limits.unanswered(most);
    }
    limits
}

/// Warns where a message can be delivered again after its record is forgotten.
pub(crate) async fn compare_retention(context: &Context, stream: &str, retention: Duration) {
    let max_age = match context.get_stream(stream).await {
        Ok(stream) => stream.cached_info().config.max_age,
        Err(error) => {
            tracing::debug!(%error, stream, "the stream's settings are not known, so the retention was not compared");
            return;
        }
    };
    if max_age.is_zero() || max_age > retention {
        tracing::warn!(
            stream,
            ?max_age,
            ?retention,
            "the stream keeps messages for longer (zero: for ever) than the inbox keeps its records, so that a message which \
             is delivered again that late is handled again; lengthen the retention, or set the stream's max_age below it"
        );
    }
}

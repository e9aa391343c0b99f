//! Telling the broker, again and again, that messages in hand are still being handled.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::task::JoinHandle;
use tokio::time::Instant;

use super::broker::BrokerMessage;

/// How many times within the broker's patience a message is kept alive: two of three signs may be lost or late.
const SIGNS: u32 = 3;

/// Keeps messages alive from a task of its own, so that a handler which does not yield does not keep it from its work (in
/// a runtime that has another thread).
pub(super) struct KeepAlive<M> {
    in_hand: Arc<Mutex<InHand<M>>>,
    answer_within: Option<Duration>,
    task: Option<JoinHandle<()>>,
}

/// The messages, and when the broker last heard of each.
type InHand<M> = HashMap<u64, (Arc<M>, Instant)>;

impl<M: BrokerMessage> KeepAlive<M> {
    pub(super) fn start(answer_within: Option<Duration>) -> Self {
        let in_hand = Arc::default();
        let task = answer_within.map(|within| {
            let every = (within / SIGNS).max(Duration::from_millis(10));
            tokio::spawn(keep_alive(Arc::clone(&in_hand), every))
        });
        Self {
            in_hand,
            answer_within,
            task,
        }
    }

    pub(super) fn add(&self, number: u64, message: &Arc<M>) {
        if self.task.is_some() {
            lock(&self.in_hand).insert(number, (Arc::clone(message), Instant::now()));
        }
    }

    /// Ends the care for a message that is about to be answered. Says whether the answer comes in time, as far as we know.
    pub(super) fn remove(&self, number: u64) -> bool {
        let last = lock(&self.in_hand).remove(&number).map(|(_, last)| last);
        match (last, self.answer_within) {
            (Some(last), Some(within)) => last.elapsed() < within,
            _ => true,
        }
    }
}

impl<M> Drop for KeepAlive<M> {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
    }
}

async fn keep_alive<M: BrokerMessage>(in_hand: Arc<Mutex<InHand<M>>>, every: Duration) {
    let mut ticks = tokio::time::interval(every / 2);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        // Half the time has passed by now, and by the next tick all of it would have.
        let due: Vec<(u64, Arc<M>)> = lock(&in_hand)
            .iter()
            .filter(|(_, (_, last))| last.elapsed() >= every / 2)
            .map(|(number, (message, _))| (*number, Arc::clone(message)))
            .collect();
        for (number, message) in due {
            match message.keep_alive().await {
                Ok(()) => {
                    if let Some((_, last)) = lock(&in_hand).get_mut(&number) {
                        *last = Instant::now();
                    }
                }
                Err(error) => tracing::debug!(%error, origin = message.origin(), "a message could not be kept alive"),
            }
        }
    }
}

fn lock<M>(in_hand: &Mutex<InHand<M>>) -> MutexGuard<'_, InHand<M>> {
    in_hand.lock().unwrap_or_else(PoisonError::into_inner)
}

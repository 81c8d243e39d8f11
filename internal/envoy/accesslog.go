package envoy

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"sync"
	"time"
)

// CaseHeader is a request header that the access log repeats, for clients that must
// find their own entry when request ids are missing or alike.
const CaseHeader = "x-case"

// An Entry is one request in the access log: Envoy writes it when the request has
// ended, and it gets here about 10 ms later. What Envoy doesn't know is zero. Text
// that is no UTF-8 reads as if it were Latin-1.
type Entry struct {
	RequestID    string         `json:"request_id"` // x-request-id, as the client sent it
	Case         string         `json:"case"`       // CaseHeader
	Protocol     string         `json:"protocol"`   // the client's: "HTTP/1.1" or "HTTP/2"
	Method       string         `json:"method"`
	Path         string         `json:"path"`
	Code         int            `json:"code"`          // the status sent; 0 if none was
	Details      string         `json:"details"`       // RESPONSE_CODE_DETAILS; an ImmediateResponse's details, with '_' for ' '
	Flags        string         `json:"flags"`         // RESPONSE_FLAGS; "-" for none
	BytesSent    int64          `json:"bytes_sent"`    // of the response body
	Duration     time.Duration  `json:"-"`             // from the request's first byte to the response's last, in whole milliseconds
	UpstreamHost string         `json:"upstream_host"` // ip:port; "" if the request never got there
	Metadata     map[string]any `json:"metadata"`      // dynamic metadata, by the namespaces in ReceivingNamespaces; nil where the server set none
}

// AccessLog returns all entries so far, in the order in which the requests ended.
func (e *Envoy) AccessLog() ([]Entry, error) {
	entries, err := e.access.read()
	return slices.Clone(entries), err
}

// Await returns the first entry in the access log that match accepts, and waits for it
// if need be. It fails when ctx is done or Envoy ends. It polls: who has thousands of
// requests in flight rather reads AccessLog in the end.
func (e *Envoy) Await(ctx context.Context, match func(Entry) bool) (Entry, error) {
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for seen := 0; ; {
		entries, err := e.access.read()
		if err != nil {
			return Entry{}, err
		}
		if i := slices.IndexFunc(entries[seen:], match); i >= 0 {
			return entries[seen+i], nil
		}
		seen = len(entries)
		select {
		case <-e.exited:
			return Entry{}, fmt.Errorf("envoy: ended while an entry was awaited: %s", e.state)
		case <-ctx.Done():
			return Entry{}, fmt.Errorf("envoy: no such entry among %d in the access log: %w", seen, context.Cause(ctx))
		case <-tick.C:
		}
	}
}

// An accessLog reads a growing file of JSON lines, each line once.
type accessLog struct {
	path string

	mu      sync.Mutex // guards the rest
	offset  int64      // of the first line that is not in entries
	entries []Entry    // only ever appended to
}

func (l *accessLog) read() ([]Entry, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f, err := os.Open(l.path)
	if err != nil {
		return nil, fmt.Errorf("envoy: access log: %w", err)
	}
	defer f.Close()
	b, err := io.ReadAll(io.NewSectionReader(f, l.offset, 1<<62))
	if err != nil {
		return nil, fmt.Errorf("envoy: access log: %w", err)
	}
	for line := range bytes.Lines(b) {
		if !bytes.HasSuffix(line, []byte("\n")) {
			break // not yet written to the end
		}
		var v struct {
			Entry
			Millis int64 `json:"duration_ms"`
		}
		if err := json.Unmarshal(line, &v); err != nil {
			return nil, fmt.Errorf("envoy: access log: %w in %q", err, line)
		}
		v.Duration = time.Duration(v.Millis) * time.Millisecond
		l.entries = append(l.entries, v.Entry)
		l.offset += int64(len(line))
	}
	return slices.Clip(l.entries), nil
}

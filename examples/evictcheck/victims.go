package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/extevict/extevict/examples/admin"
)

// An operator speaks to the admin endpoint.
type operator struct {
	client  *http.Client
	url     string // base
	renamed bool   // a request was found, and not by the id that the check had sent
}

// unique is how many bytes an id has at least that nobody else can have by chance.
const unique = 16

// find returns the query by which /abort finds the request of s, or "" and how many
// others are listed. A gateway may have given it an id of its own; then it is found by
// what the response says, never by guessing: only the check's own requests are evicted.
func (o *operator) find(ctx context.Context, s *stream) (query string, listed int, err error) {
	v := s.look()
	for i, id := range append([]string{s.id}, v.ids...) {
		if len(id) < unique {
			continue
		}
		l, err := o.list(ctx, url.Values{"id": {id}})
		if err != nil {
			return "", 0, err
		}
		if len(l.Requests) > 0 {
			o.renamed = i > 0
			return l.Requests[0].Query, l.Total, nil
		}
	}
	l, err := o.list(ctx, url.Values{"limit": {"1000"}})
	if err != nil {
		return "", 0, err
	}
	// An engine names its answer after the x-request-id that it got: cmpl-<id>-0.
	for _, r := range l.Requests {
		for _, id := range v.ids {
			if len(r.ID) >= unique && strings.Contains(id, r.ID) {
				o.renamed = true
				return r.Query, l.Total, nil
			}
		}
	}
	return "", l.Total, nil
}

// list returns what is in flight.
func (o *operator) list(ctx context.Context, values url.Values) (l admin.List, err error) {
	err = o.do(ctx, http.MethodGet, "/requests", values, &l)
	return l, err
}

// abort ends the requests that query finds and returns how many there were.
func (o *operator) abort(ctx context.Context, query string) (int, error) {
	values, err := url.ParseQuery(query)
	if err != nil {
		return 0, err
	}
	var r admin.Result
	err = o.do(ctx, http.MethodPost, "/abort", values, &r)
	return r.Ended, err
}

func (o *operator) do(ctx context.Context, method, path string, values url.Values, answer any) error {
	target := o.url + path
	var form io.Reader
	if method == http.MethodPost {
		form = strings.NewReader(values.Encode())
	} else {
		target += "?" + values.Encode()
	}
	req, err := http.NewRequestWithContext(ctx, method, target, form)
	if err != nil {
		return err
	}
	if form != nil {
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	resp, err := o.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s %s: %s: %.200q", method, o.url+path, resp.Status, body)
	}
	if err := json.Unmarshal(body, answer); err != nil {
		return fmt.Errorf("%s %s: %w", method, o.url+path, err)
	}
	return nil
}
